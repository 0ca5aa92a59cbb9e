"""Text in and out: tokenizers (hub directory or GGUF), chat templates, sampling and streaming."""
