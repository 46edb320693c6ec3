"""The sequences of a step: prompts, responses, rewards, log-probs, values and advantages."""
