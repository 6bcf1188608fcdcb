"""Speculative decoding for `transformers` with a drafter that costs the same at any context length.

`target.generate(**inputs, assistant_model=drafter)` works from the moment this package is imported.
"""

from transformers import AutoConfig, AutoModel

from .cache_longspark import LongSparkCache
from .configuration_longspark import LongSparkConfig
from .generation_longspark import LongSparkStats, install, uninstall
from .inplace_longspark import InPlaceCache
from .modeling_longspark import LongSparkDrafter


__version__ = "0.1.0"

AutoConfig.register(LongSparkConfig.model_type, LongSparkConfig, exist_ok=True)
AutoModel.register(LongSparkConfig, LongSparkDrafter, exist_ok=True)

__all__ = [
    "InPlaceCache",
    "LongSparkCache",
    "LongSparkConfig",
    "LongSparkDrafter",
    "LongSparkStats",
    "install",
    "uninstall",
]
