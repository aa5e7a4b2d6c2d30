"""Import of models that other segmentation programs have trained."""
