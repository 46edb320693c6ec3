"""Training in which all workers go in step: what every such trainer and every rank of it need.

``trainer`` (driver), ``calls`` and ``watch`` (one cause, hangs), ``worker`` (the actor, what it
prints) and ``member`` (the rank that it is), ``pulse`` (where each rank is), ``data`` and ``plan``
(who takes which samples), ``mesh`` (and tensors cut over it), ``options`` (what is refused).
"""
