-- needs: session
-- ARGV: now, idle, idle of a bound one
local ends, mode = unpack(redis.call('HMGET', base, 'ends', 'mode'))
local now = tonumber(ARGV[1])
if ends and now < seconds(ends) then
    move_deadline(now, idle_of(mode, ARGV[2], ARGV[3]), seconds(ends))
end
return false
