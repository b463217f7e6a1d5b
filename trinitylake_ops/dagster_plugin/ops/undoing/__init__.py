"""Operations that undo, each as a plan first: rollback, restore, and the drop of an export; and their proof."""
