"""What files of tables claim, checked before a decoder believes it; and the seals of our own."""
