"""Dilated branches as dense problems on strided views: their plan, their launches on a kernel library, and the merge of their results."""
