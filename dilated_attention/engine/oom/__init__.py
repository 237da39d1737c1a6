"""How much memory a call needs, how much there is, and the message for a call that runs out of it."""
