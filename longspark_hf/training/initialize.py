"""Starting weights for a small training budget: draft layers that begin as the target layers they are paired with.

Leaves no trace in the forward pass: a drafter so started is an ordinary drafter.
"""

import torch
from transformers import PreTrainedModel

from longspark_hf.modeling_longspark import LongSparkDrafter
from longspark_hf.target_longspark import BorrowedTarget, call_borrowed


@torch.no_grad()
def initialize_from_target(
    drafter: LongSparkDrafter, target: PreTrainedModel, input_ids: torch.LongTensor | None = None
) -> list[str]:
    r"""
    Copy the paired target layers into the draft layers, by name and shape, and start the Markov head from the target's
    embeddings.

    Args:
        drafter ([`LongSparkDrafter`]): Changed in place.
        target (`PreTrainedModel`): The target.
        input_ids (`torch.LongTensor` of shape `(1, length)`, *optional*):
            A typical sequence. Summary queries then start as queries the target's layers make over it.

    Returns:
        `list[str]`: names of the parameters that were set.
    """
    config = drafter.config
    borrowed = BorrowedTarget.of(target, config)
    done = []
    for index, layer_id in enumerate(config.target_layer_ids):
        source = dict(borrowed.layers[layer_id].named_parameters())
        for name, parameter in drafter.layers[index].named_parameters():
            if name in source and source[name].shape == parameter.shape:
                parameter.copy_(source[name])
                done.append(f"layers.{index}.{name}")
    if input_ids is not None and _queries_from_target(drafter, target, borrowed, input_ids):
        done.append("summary_queries")

    # Predecessors with similar embeddings start with similar rows: the principal directions of the table, at unit scale.
    table = call_borrowed(borrowed.embed_tokens, torch.arange(config.vocab_size, device=target.device)[None])[0]
    table = table.float().to(drafter.device)
    table = table - table.mean(dim=0)
    rank = min(config.markov_rank, config.hidden_size)
    _, directions = torch.linalg.eigh(table.T @ table)
    projected = table @ directions[:, -rank:]
    drafter.markov_head.w1.weight[:, :rank] = projected / projected.std(dim=0).clamp(min=1e-6)
    drafter.markov_head.w2.weight.zero_()
    return done + ["markov_head.w1.weight", "markov_head.w2.weight"]


def _queries_from_target(
    drafter: LongSparkDrafter, target: PreTrainedModel, borrowed: BorrowedTarget, input_ids: torch.LongTensor
) -> bool:
    config, taken, handles = drafter.config, {}, []
    for index, layer_id in enumerate(config.target_layer_ids):
        projection = getattr(getattr(borrowed.layers[layer_id], "self_attn", None), "q_proj", None)
        if projection is None:
            return False
        handles.append(projection.register_forward_hook(lambda _m, _a, out, index=index: taken.update({index: out})))
    try:
        target.get_decoder()(input_ids=input_ids.to(target.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    length = input_ids.shape[1]
    rows = torch.linspace(length // 4, length - 1, config.num_summary_queries).long()
    for index, queries in taken.items():
        queries = queries[0, rows.to(queries.device)].view(len(rows), -1, config.head_dim)
        norm = getattr(borrowed.layers[config.target_layer_ids[index]].self_attn, "q_norm", None)
        queries = queries if norm is None else norm(queries)
        if queries.shape[1] != config.num_attention_heads:
            return False
        drafter.summary_queries[index] = queries.transpose(0, 1).to(drafter.summary_queries)
    return True
