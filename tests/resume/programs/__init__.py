"""Programs as people write them, around steps(): nothing in them knows that they may be ended."""
