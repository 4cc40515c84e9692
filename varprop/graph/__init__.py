"""Networks with their own `forward`: the torch.fx graph is traced once and walked with a method's rules."""
