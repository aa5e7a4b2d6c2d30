"""Convert ONNX files to torch modules."""
