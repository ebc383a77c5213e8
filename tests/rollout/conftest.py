import torch


def pytest_configure() -> None:
    torch.set_num_threads(1)
