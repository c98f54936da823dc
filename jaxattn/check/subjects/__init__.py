"""The kinds of what is checked, each behind one signature."""
