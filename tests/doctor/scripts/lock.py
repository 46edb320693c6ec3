"""Rank 1 takes a lock that it already has."""

import threading

from common import RANK, loader, model, optimizer, start, step

start()
net = model()
opt = optimizer(net)
lock = threading.Lock()


def save():
    with lock:
        log()


def log():
    lock.acquire()


for number, batch in enumerate(loader()):
    step(net, opt, batch)
    if RANK == 1 and number == 2:
        save()
