"""Block-sparse attention over a sharded sequence: plan, schedule of messages, and execution."""
