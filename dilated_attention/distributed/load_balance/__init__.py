"""Layouts whose processes have equal work: how work is counted, and how positions are dealt out."""
