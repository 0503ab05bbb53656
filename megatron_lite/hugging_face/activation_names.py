"""transformers' names of the MLP's activations (its ACT2FN) -> ours. The first name of several is the one exported."""

# Of one input, and of a gate and an input.
PLAIN = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf", "relu2": "squared_relu"}
GATED = {"silu": "swiglu", "swish": "swiglu"}
