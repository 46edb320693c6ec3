"""Language models as policies: generate responses, and compute the log-probs of tokens."""
