"""Fixtures of the suite."""

import pytest
import torch

from . import targets


# Models here are tiny: a second thread costs more than it gives.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1234)


@pytest.fixture(scope="session")
def built():
    """Tiny targets by name, each made once. Tests must leave them as they are."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = targets.build(name)
        return made[name]

    return get


@pytest.fixture
def qwen3(built):
    return built("qwen3")


@pytest.fixture
def prompt():
    return torch.randint(2, 90, (1, 20), generator=torch.Generator().manual_seed(7))
