"""The ground floor, which every room uses: errors, geometry, layouts, dtypes, configuration. It never imports torch."""
