"""What tokens stand for: bytes and bases, FASTA files, and k-mers of bases."""
