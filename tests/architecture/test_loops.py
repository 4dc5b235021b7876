"""There is one training loop, and statements are not copied."""

from architecture.loops import copies, training_loops
from architecture.source import package, parse

TRAINING_LOOPS = ["trainer.loop.fit"]

LOOP = """
def fit(self):
    for batch in self.loader:
        metrics = self.step(batch)
        if self.is_due():
            self.save()
        tracking.log(metrics)
"""
STATEMENTS = """
def {name}({size}):
    {size} = {size} + {number}
    first = make({size})
    if first:
        first.update({name})
    second = [item for item in first]
    report(second, {number})
    return first
"""


def test_the_package_has_one_training_loop() -> None:
    assert training_loops(package()) == TRAINING_LOOPS


def test_another_training_loop_is_found() -> None:
    assert training_loops(parse(trainer__stream=LOOP)) == ["trainer.stream.fit"]
    assert training_loops(parse(trainer__stream=LOOP.replace("for batch in self.loader", "while True"))) == [
        "trainer.stream.fit"
    ]
    assert not training_loops(parse(trainer__stream=LOOP.replace("self.save()", "self.stop()")))


def test_no_statements_are_copied() -> None:
    assert not copies(package())


def test_copied_statements_are_found_under_other_names() -> None:
    one, other = (STATEMENTS.format(name=name, size=size, number=len(size)) for name, size in (("f", "a"), ("g", "bb")))
    assert copies(parse(one=one, other=other)) == [["one:3", "other:3"]]
    assert copies(parse(one=one + other)) == [["one:3", "one:12"]]
    assert not copies(parse(one=one, other=other.replace(".update(", ".pop(")))
    assert not copies(parse(one=one))


def test_statements_that_resemble_their_neighbors_are_not_copies() -> None:
    lines = "".join(f"    check({number})\n" for number in range(20))
    assert not copies(parse(one=f"def f():\n{lines}"))
    assert copies(parse(one=f"def f():\n{lines}", other=f"def g():\n{lines}"))
