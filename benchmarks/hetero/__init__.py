"""PyTorch's ways to train on unequal devices, and elche's, side by side."""
