"""Rules by family of layers: what every method shares, and the activations and maxima in which methods differ."""
