"""Plans of all layouts, compared."""
