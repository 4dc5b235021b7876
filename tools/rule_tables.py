"""Write the tables of contract rules in docs/engines.md, docs/rollouts.md and docs/tinker-servers.md.

python tools/rule_tables.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from camshaft.contracts.engine.suite import RULES as ENGINE_RULES  # noqa: E402
from camshaft.contracts.rollout.suite import RULES as ROLLOUT_RULES  # noqa: E402
from camshaft.contracts.rules import rule_table  # noqa: E402
from camshaft.contracts.tinker.suite import RULES as TINKER_RULES  # noqa: E402

TABLES = {
    "docs/engines.md": rule_table(ENGINE_RULES),
    "docs/rollouts.md": rule_table(ROLLOUT_RULES),
    "docs/tinker-servers.md": rule_table(TINKER_RULES),
}
TABLE = re.compile(r"\| rule \| meaning \|\n(\|.*\n)+")

if __name__ == "__main__":
    for page, table in TABLES.items():
        path = ROOT / page
        path.write_text(TABLE.sub(lambda _, table=table: table, path.read_text(encoding="utf-8")), encoding="utf-8")
