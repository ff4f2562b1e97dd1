"""The engines whose metrics are known, a file of names each. Which one a text is of shows in its names."""

from telemetry.metrics.engines.names import EngineNames
from telemetry.metrics.engines.sglang import SGLANG
from telemetry.metrics.engines.tensorrt_llm import TENSORRT_LLM
from telemetry.metrics.engines.vllm import VLLM

ENGINES: tuple[EngineNames, ...] = (VLLM, SGLANG, TENSORRT_LLM)

__all__ = ["ENGINES", "EngineNames"]
