"""Training: synthetic nuclei, targets, the training loop and the evaluation."""
