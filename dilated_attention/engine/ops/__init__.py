"""The attention ops: from a public call's arguments to a resolved call, with schema, fake implementation, autograd and FLOPs."""
