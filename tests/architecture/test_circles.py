"""Modules do not import each other in a circle."""

from architecture.circles import circles, find_imports
from architecture.source import package, parse


def test_modules_form_no_import_circle() -> None:
    found = circles(find_imports(package()))
    assert not found, "\n".join(" <-> ".join(circle) for circle in found)


def test_a_late_import_closes_a_circle() -> None:
    modules = parse(
        a="from camshaft.b import f",
        b="import camshaft.c",
        c="def late():\n    from camshaft import a",
        d="from camshaft.a import g",
    )
    assert circles(find_imports(modules)) == [["camshaft.a", "camshaft.b", "camshaft.c"]]


def test_an_import_for_type_checkers_closes_no_circle() -> None:
    modules = parse(
        a="from camshaft.b import f",
        b="if TYPE_CHECKING:\n    from camshaft.a import A\nelse:\n    import camshaft.c",
        c="",
    )
    assert not circles(find_imports(modules))
    assert find_imports(modules)["camshaft.b"] == {"camshaft.c"}


def test_a_package_face_leads_to_the_module_that_defines_the_name() -> None:
    modules = parse(
        p="from camshaft.p.low import f\nfrom camshaft.p.high import g",
        p__low="def f(): ...",
        p__high="from camshaft.p import f",
        user="from camshaft.p import g, missing",
    )
    assert not circles(find_imports(modules))
    assert find_imports(modules)["camshaft.user"] == {"camshaft.p", "camshaft.p.high"}
    modules |= parse(p__low="from camshaft.p import g")
    assert circles(find_imports(modules)) == [["camshaft.p.high", "camshaft.p.low"]]
