"""The engine based on torch.compile."""
