"""Operations of sampling on logits: cuts, draws, edits of single tokens."""
