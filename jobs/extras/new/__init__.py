"""Write a recipe for a folder of images."""
