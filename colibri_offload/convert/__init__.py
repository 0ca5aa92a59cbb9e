"""Conversion: a GGUF or safetensors model → a store whose weights already lie in the compute layout."""

from colibri_offload.convert.conversion import convert

__all__ = ["convert"]
