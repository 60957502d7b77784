"""Runs as pages: one HTML file each, which loads nothing.

    film       records plans and scenarios; what a page shows, as an object for JSON
    page       puts this object, the script and the style sheet into one file
    play       a server of such pages, where a reader changes what happens
    *.html, *.css, *.js   what the pages consist of; `player` is the script of a run

A page holds data and a script that draws it. Nothing in the data is ever interpreted as HTML.
"""
