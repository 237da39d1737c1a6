"""Communication between the ranks of a group: messages, checks that all make the same call, and errors when one fails."""
