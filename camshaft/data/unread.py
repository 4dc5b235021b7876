"""Notices about columns that look like tools, images or preference pairs, and that a run does not read.

log_unread_columns(table, read={"prompt", "ground_truth"})
"""

import logging
import re
from collections.abc import Collection

from camshaft.config.foreign.topics import DPO, IMAGES, VIDEO
from camshaft.data.tables import Table

TOOLS = r"(?:available_)?tools?|functions|tool_schemas?|tools_json"
READ_TOOLS = "Set data.tools_key={name} to pass its tools to the chat template."
KINDS = {
    r"images?|image_\w+|pixel_values|pictures?": IMAGES.message(),
    r"videos?|video_\w+|audios?|audio_\w+|speech": VIDEO.message(),
    "chosen|rejected": f"{DPO.message()} camshaft rm trains a reward model on pairs of chosen and rejected responses.",
}
"""Pattern of the names of columns -> what to do about them."""

logger = logging.getLogger(__name__)


def log_unread_columns(table: Table, read: Collection[str | None], tools_hint: str) -> None:
    """Log a warning for columns that are not in `read` although their names promise something that a model needs.

    `tools_hint` says how tools are read; `{name}` stands for the column.
    """
    columns = dict.fromkeys(name for source in table.sources for name in source.columns)
    unread = [name for name in columns if name not in read]
    for pattern, hint in {TOOLS: tools_hint, **KINDS}.items():
        if names := [name for name in unread if re.fullmatch(pattern, name)]:
            logger.warning(
                "the column%s %s %s not read. %s",
                *("s" if names[1:] else "", ", ".join(names), "are" if names[1:] else "is"),
                hint.replace("{name}", names[0]),
            )
