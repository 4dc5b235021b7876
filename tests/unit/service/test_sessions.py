"""The versions of the SDK that the server accepts, warns about and refuses."""

import pytest

from camshaft.planning.doctor import imports
from camshaft.service.errors import Refused
from camshaft.service.sessions import check_sdk


@pytest.mark.parametrize("version", ["0.38.0", "0.38.7", "", "unknown"])
def test_tested_versions_of_the_sdk_have_no_warning(version: str) -> None:
    assert check_sdk(version) is None


@pytest.mark.parametrize("version", ["0.25.0", "0.37.2", "0.39.0", "1.0.1"])
def test_other_versions_have_a_warning_that_names_the_page(version: str) -> None:
    warning = check_sdk(version)
    assert warning is not None
    assert f"is tested with tinker>=0.38,<0.39, and this is {version}; see docs/serve.md#newer-sdks" in warning


def test_a_version_that_sends_json_is_refused_with_the_reason() -> None:
    with pytest.raises(Refused, match=r"tinker 0.24.1 sends requests as JSON.*install tinker>=0.38,<0.39"):
        check_sdk("0.24.1")


@pytest.mark.parametrize(
    ("version", "status", "message"),
    [
        (None, "OK", "is tested with tinker>=0.38,<0.39; not installed here"),
        ("0.38.2", "OK", "is tested with tinker>=0.38,<0.39; installed: 0.38.2"),
        ("0.39.0", "WARN", "is tested with tinker>=0.38,<0.39, and tinker 0.39.0 is installed"),
    ],
)
def test_doctor_states_the_tested_versions(
    version: str | None, status: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "package_version", lambda name: version)
    (finding,) = imports.check_tinker_sdk()
    assert finding.status == status
    assert message in finding.message
