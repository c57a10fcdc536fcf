-- needs: session story
-- ARGV: fencing epoch; of the entry of its story, the time and the text
-- The late end of a displaced connection changes nothing (TKO9).
local fields = redis.call('HMGET', base, 'conn', 'fence')
if not fields[1] or fields[2] ~= ARGV[1] then
    return 0
end
redis.call('HDEL', base, 'conn')
if ARGV[2] then
    tell(ARGV[2], ARGV[3])
end
return 1
