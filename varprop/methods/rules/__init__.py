"""Rules by family of layers. Methods share most of them and differ in activations and maxima."""
