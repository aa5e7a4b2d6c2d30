"""ONNX file -> torch module, without a runtime of ONNX."""
