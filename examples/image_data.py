"""Images for the examples: CIFAR-10 where a copy lies, else scikit-learn's handwritten digits."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

CIFAR_FOLDER = "cifar-10-batches-py"


def load_images(
    dataset: str = "digits", folder: str = "data", say: bool = True
) -> tuple[np.ndarray, ...]:
    """(train images, train labels, test images, test labels); images are float32, N x C x H x W.

    ``dataset="cifar10"`` reads the standard Python version from ``folder/cifar-10-batches-py`` and
    falls back to the digits where there is none. It says so; of several workers, one is enough.
    """
    root = Path(folder) / CIFAR_FOLDER
    if dataset == "cifar10" and root.is_dir():
        return _load_cifar(root)
    if dataset == "cifar10" and say:
        print(f"no {root} here: using scikit-learn's digits instead")
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
        # The format is pickle: only for a copy you trust, as with every loader of it.
        with open(root / name, "rb") as file:
            content = pickle.load(file, encoding="bytes")
        images = content[b"data"].reshape(-1, 3, 32, 32).astype(np.float32) / 127.5 - 1.0
        return images, np.asarray(content[b"labels"], np.int64)

    parts = [batch(f"data_batch_{i}") for i in range(1, 6)]
    images, labels = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return images, labels, *batch("test_batch")
