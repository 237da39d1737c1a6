"""What the training examples share: settings, processes, checkpoints, a log and the loop. Copy this folder to train a model of yours."""
