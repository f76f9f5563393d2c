def shrink_and_write(*a): pass
