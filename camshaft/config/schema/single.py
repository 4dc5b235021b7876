"""Options of the `reference` engine.

SingleDeviceOptions.from_dict({"mixed_precision": {"param_dtype": "bfloat16"}})
"""

from collections.abc import Iterator, Mapping
from typing import Any

from camshaft.config.engine import Conflict, EngineModel, EngineOptions
from camshaft.config.families.conflicts import packed_conflicts
from camshaft.config.schema.fsdp import MixedPrecision


class SingleDeviceOptions(EngineOptions):
    """Options of `SingleDeviceEngine`."""

    mixed_precision: MixedPrecision = MixedPrecision()
    """With `param_dtype=bfloat16` the model computes in bfloat16 and the optimizer updates float32 master weights.
    Gradients are accumulated in the dtype of the weights."""

    def family_conflicts(self, values: Mapping[str, Any], model: EngineModel) -> Iterator[Conflict]:
        return packed_conflicts(values, model)

    def conflicts(self, model: EngineModel) -> Iterator[Conflict]:
        if self.mixed_precision.reduce_dtype == "bfloat16":
            yield Conflict(
                "mixed_precision.reduce_dtype",
                "reduce_dtype=bfloat16 has no effect with strategy=reference, which has no ranks to reduce gradients "
                "over",
                ("mixed_precision.reduce_dtype=float32",),
            )
