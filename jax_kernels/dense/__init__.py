"""Operations on channels alone."""
