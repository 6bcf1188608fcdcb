"""Drafters on the Hub: cards, conversion of released checkpoints, upload. Not part of the remote code."""

from .card import model_card
from .convert import convert
from .push import plan_push, push


__all__ = ["convert", "model_card", "plan_push", "push"]
