"""ONNX file -> torch module, without onnx or a runtime of it."""
