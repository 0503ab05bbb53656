"""The flags of a mixture of experts: which layers have experts, how tokens are routed, what balances them."""

from dataclasses import dataclass, fields

from megatron_lite.config.declare import Numbers, Words, flag

# Expert flags that may differ from a checkpoint's: they change how it trains, not what its weights mean.
TRAINING_ONLY = frozenset(
    {
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_bias_update_rate",
        "moe_router_dtype",
        "moe_per_layer_logging",
    }
)


@dataclass(frozen=True)
class ExpertConfig:
    """Mixture of experts."""

    num_experts: int | None = flag(None, "experts E of a layer; 0 or none: a dense model", minimum=0)
    moe_router_topk: int = flag(2, "experts K that each token is sent to", minimum=1)
    moe_ffn_hidden_size: int | None = flag(
        None, "width of one expert's MLP; default --ffn-hidden-size", minimum=1
    )
    moe_layer_freq: int | Numbers = flag(
        1,
        "N: layers 0, N, 2N, ... have experts, the others are dense; or one 0 (dense) or 1 for each layer, "
        "e.g. '([0]+[1]*23)'",
        nargs="+",
        layer_pattern=True,
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None,
        "width of the MLP that every token takes beside its experts: all shared experts together",
        minimum=1,
    )
    moe_shared_expert_gate: bool = flag(False, "multiply the shared expert by sigmoid(x w), w of width H")
    moe_router_score_function: str = flag(
        "softmax", "scores of the experts from the router's logits", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = flag(
        False, "softmax over all experts before the choice; default: over the chosen ones after it"
    )
    moe_router_num_groups: int | None = flag(
        None,
        "equal groups of neighbouring experts, of which --moe-router-group-topk are chosen first",
        minimum=1,
    )
    moe_router_group_topk: int | None = flag(None, "groups that a token's experts may come from", minimum=1)
    moe_router_topk_scaling_factor: float | None = flag(
        None, "multiplies the weights of the chosen experts", above=0
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "a bias for each expert, for the choice only, moved each step towards equal loads"
    )
    moe_router_bias_update_rate: float = flag(1e-3, "how far a step moves the expert bias", minimum=0)
    moe_router_dtype: str | None = flag(
        None,
        "number format of the router's logits; default that of the activations",
        choices=("fp32", "fp64"),
    )
    moe_router_load_balancing_type: Words = flag(
        ("aux_loss",),
        "aux_loss (over a microbatch), seq_aux_loss (over each sequence) or none; several with as many "
        "coefficients",
        nargs="+",
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag(
        (0.0,), "factor of each balancing loss in the training loss", nargs="+"
    )
    moe_z_loss_coeff: float | None = flag(
        None, "factor of the mean squared logsumexp of the router's logits in the training loss", minimum=0
    )
    moe_per_layer_logging: bool = flag(False, "the balancing losses of each layer to the trackers")

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of this global number is a mixture; the others are dense."""
        if not self.num_experts:
            return False
        pattern = self.moe_layer_freq
        return layer % pattern == 0 if isinstance(pattern, int) else bool(pattern[layer])

    @property
    def balancing_coefficients(self) -> dict[str, float]:
        """{balancing loss: its coefficient}, those that are on: a coefficient above 0."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff)
        return {kind: coefficient for kind, coefficient in pairs if kind != "none" and coefficient}


EXPERT_FIELDS = frozenset(item.name for item in fields(ExpertConfig))
