"""Load CIFAR-10, if a copy exists, or scikit-learn's handwritten digits."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

CIFAR_FOLDER = "cifar-10-batches-py"


def load_images(
    dataset: str = "digits", folder: str = "data", say: bool = True
) -> tuple[np.ndarray, ...]:
    """Return train images, train labels, test images and test labels.

    Images are float32 arrays of shape N x C x H x W. ``dataset="cifar10"`` reads the Python version
    from ``folder/cifar-10-batches-py``. If it doesn't exist, the digits are used, and a message is
    printed if ``say`` is True.
    """
    root = Path(folder) / CIFAR_FOLDER
    if dataset == "cifar10" and root.is_dir():
        return _load_cifar(root)
    if dataset == "cifar10" and say:
        print(f"{root} not found. Using scikit-learn's digits instead.")
    return load_digits_images()


def load_digits_images() -> tuple[np.ndarray, ...]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images / 8.0 - 1.0).astype(np.float32)[:, None]
    labels = digits.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order], labels[order]
    split = len(labels) * 4 // 5
    return images[:split], labels[:split], images[split:], labels[split:]


def _load_cifar(root: Path) -> tuple[np.ndarray, ...]:
    def batch(name: str) -> tuple[np.ndarray, np.ndarray]:
        # The format is pickle, so use only a copy that you trust.
        with open(root / name, "rb") as file:
            content = pickle.load(file, encoding="bytes")
        images = content[b"data"].reshape(-1, 3, 32, 32).astype(np.float32) / 127.5 - 1.0
        return images, np.asarray(content[b"labels"], np.int64)

    parts = [batch(f"data_batch_{i}") for i in range(1, 6)]
    images, labels = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return images, labels, *batch("test_batch")
