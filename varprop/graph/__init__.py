"""Networks with their own `forward`: their torch.fx graph is taken once and walked with a method's rules."""
