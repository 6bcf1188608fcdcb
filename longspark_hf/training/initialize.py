"""Starting weights for a small training budget: draft layers that begin as the target layers they are paired with, on
inputs that begin as a least-squares estimate of what those layers are used to.

Leaves no trace in the forward pass: a drafter so started is an ordinary drafter.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from longspark_hf.modeling_longspark import LongSparkDrafter
from longspark_hf.target_longspark import BorrowedTarget, call_borrowed

from .views import run_target


# Root mean square of what a fusion's SiLU sees at the start: nearly linear there, yet no tiny weights that Adam would upset.
NEARLY_LINEAR = 0.3


@torch.no_grad()
def initialize_from_target(
    drafter: LongSparkDrafter, target: PreTrainedModel, sequences: Sequence[torch.LongTensor] = ()
) -> None:
    r"""
    Copy the paired target layers into the draft layers, by name and shape, and start the Markov head from the target's
    embeddings.

    Args:
        drafter ([`LongSparkDrafter`]): Changed in place.
        target (`PreTrainedModel`): The target.
        sequences (`Sequence[torch.LongTensor]` of shape `(1, length)` each, *optional*):
            Typical token ids. Block inputs then start by [`fit_block_inputs`] over them.

    Summary queries keep their random start: those of the target's own layers would draw attention to the summary that the
    copied layers do not expect, and measured worse.
    """
    config = drafter.config
    borrowed = BorrowedTarget.of(target, config)
    for layer, layer_id in zip(drafter.layers, config.target_layer_ids):
        source = dict(borrowed.layers[layer_id].named_parameters())
        for name, parameter in layer.named_parameters():
            if name in source and source[name].shape == parameter.shape:
                parameter.copy_(source[name])
    if len(sequences):
        fit_block_inputs(drafter, target, sequences)

    # Predecessors with similar embeddings start with similar rows: the principal directions of the table, at unit scale.
    table = call_borrowed(borrowed.embed_tokens, torch.arange(config.vocab_size, device=target.device)[None])[0]
    table = table.float().to(drafter.device)
    table = table - table.mean(dim=0)
    rank = min(config.markov_rank, config.hidden_size)
    _, directions = torch.linalg.eigh(table.T @ table)
    projected = table @ directions[:, -rank:]
    drafter.markov_head.w1.weight[:, :rank] = projected / projected.std(dim=0).clamp(min=1e-6)
    drafter.markov_head.w2.weight.zero_()


@torch.no_grad()
def fit_block_inputs(
    drafter: LongSparkDrafter, target: PreTrainedModel, sequences: Sequence[torch.LongTensor], ridge: float = 1e-2
) -> float:
    r"""
    Start the block inputs as the best estimate, from the anchor's embedding and the boundary states, of the hidden state
    that the target feeds into the first paired layer at the anchor.

    The first matrix of each fusion mixes the linear estimate into its hidden units at a size where SiLU is nearly linear,
    the second is fitted behind the SiLU, and the norm gives the result the size that the target's layers are used to.
    Slots after the anchor start from the mean embedding.

    Args:
        drafter ([`LongSparkDrafter`]): Its fusions and position embedding are changed in place.
        target (`PreTrainedModel`): The target.
        sequences (`Sequence[torch.LongTensor]` of shape `(1, length)` each):
            Typical token ids, in all many more than `(n + 1) * hidden_size`.
        ridge (`float`, *optional*, defaults to 0.01): Penalty, relative to the variance of the features.

    Returns:
        `float`: share of the states' variance that the estimate explains on these sequences.

    Needs memory for a few matrices of `((n + 1) * hidden_size)**2` in float64, on the drafter's device.
    """
    config, hidden_size = drafter.config, drafter.config.hidden_size
    token_ids, boundaries, states = _entering_states(drafter, target, sequences)
    borrowed = BorrowedTarget.of(target, config)
    tokens = _embed(borrowed, token_ids).to(boundaries)
    mean_token = tokens.mean(dim=0)
    tokens = tokens - mean_token
    generator = torch.Generator().manual_seed(0)
    mix = torch.linalg.qr(torch.randn(hidden_size, hidden_size, generator=generator))[0].to(boundaries)

    solution = _ridge(torch.cat([tokens, boundaries], dim=1), states, ridge)
    from_boundary = boundaries @ solution[:, hidden_size:].T
    boundary, mapping = drafter.boundary_fusion, drafter.input_mapping
    boundary.fc1.weight.copy_(mix @ solution[:, hidden_size:] * (NEARLY_LINEAR / _size(from_boundary)))
    boundary.fc2.weight.copy_(
        _ridge(F.silu(boundary.fc1(boundaries)), from_boundary / _size(from_boundary), ridge / 10)
    )
    boundary.norm.weight.fill_(1.0)

    features = torch.cat([tokens, boundary(boundaries)], dim=1)
    solution = _ridge(features, states, ridge / 10)
    mapping.fc1.weight.copy_(mix @ solution * (NEARLY_LINEAR / _size(features @ solution.T)))
    mapping.fc2.weight.copy_(_ridge(F.silu(mapping.fc1(features)), states / _size(states), ridge / 10))
    mapping.norm.weight.fill_(1.0)
    normed = mapping(features)
    mapping.norm.weight.copy_((normed * states).sum(dim=0) / normed.square().sum(dim=0))

    mask_token = _embed(borrowed, torch.tensor([config.mask_token_id]))[0]
    drafter.position_embedding.weight.copy_(-mask_token)
    drafter.position_embedding.weight[0] = -mean_token
    rest = states - mapping(features)
    return (1 - rest.square().sum() / (states - states.mean(dim=0)).square().sum()).item()


def _embed(borrowed: BorrowedTarget, token_ids: torch.LongTensor) -> torch.Tensor:
    return call_borrowed(borrowed.embed_tokens, token_ids[None])[0]


def _size(states: torch.Tensor) -> torch.Tensor:
    return states.square().mean().sqrt()


def _ridge(features: torch.Tensor, targets: torch.Tensor, penalty: float) -> torch.Tensor:
    """The matrix that maps features to targets with least squared error, `(targets, features)`."""
    scale = features.square().mean(dim=0).sqrt().clamp(min=1e-6)  # some states are a thousand times larger than others
    features = (features / scale).double()
    gram = features.T @ features / len(features)
    gram.diagonal().add_(penalty)
    solution = torch.linalg.solve(gram, features.T @ targets.double() / len(features))
    return solution.T.to(targets.dtype) / scale


def _entering_states(
    drafter: LongSparkDrafter, target: PreTrainedModel, sequences: Sequence[torch.LongTensor]
) -> tuple[torch.LongTensor, torch.Tensor, torch.Tensor]:
    """Tokens, flat boundaries before them, and what the block input must add to enter the first paired layer there."""
    config, borrowed = drafter.config, BorrowedTarget.of(target, drafter.config)
    entering, parts = [], []

    def keep(_module, args, kwargs):
        entering.append(args[0] if args else kwargs["hidden_states"])

    handle = borrowed.layers[config.target_layer_ids[0]].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        for input_ids in sequences:
            rows = run_target(target, borrowed, config, input_ids, torch.ones_like(input_ids), drafter.device)[0]
            boundaries = rows.boundaries[:-1].to(drafter.dtype)  # an anchor's boundary is the row before it
            state = entering.pop()[0, 1:].to(boundaries)
            if config.boundary_residual is not None:
                state = state - boundaries[:, config.boundary_residual]
            parts.append((rows.input_ids[1:], boundaries.flatten(1), state))
    finally:
        handle.remove()
    token_ids, boundaries, states = (torch.cat(part) for part in zip(*parts))
    return token_ids, boundaries, states
