-- needs: session
-- ARGV: origin, fencing epoch, log epoch and number of the last event that is there
if redis.call('EXISTS', base) == 0 then
    return 0
end
local carried = redis.call('HGET', base .. ':c', ARGV[1])
if carried and tonumber(string.match(carried, '^%d+')) > tonumber(ARGV[2]) then
    return 0
end
redis.call('HSET', base .. ':c', ARGV[1], table.concat({ ARGV[2], ARGV[3], ARGV[4] }, ' '))
share_lifetime(base .. ':c')
return 1
