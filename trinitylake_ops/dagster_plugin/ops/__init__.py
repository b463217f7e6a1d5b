"""Operations as jobs."""
